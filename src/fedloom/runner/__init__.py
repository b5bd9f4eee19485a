"""How a run is put together and carried out: a library, which the command line, pipelines and experiments use."""
