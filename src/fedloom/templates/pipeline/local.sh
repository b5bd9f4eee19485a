# Run the pipeline on this machine. Its folder must be new: move out/ away before you repeat it.
set -eu
fedloom pipeline local personalized_federation experiment.yaml --out out
