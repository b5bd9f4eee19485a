"""Library that assembles and runs experiments; the command line, pipelines and experiments use it."""
