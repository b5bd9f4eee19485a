"""Entry point of ``python -m fedloom``."""

from fedloom.cli.main import program

if __name__ == "__main__":
    program()
