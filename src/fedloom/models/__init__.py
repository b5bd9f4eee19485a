"""Networks, as functions of a flat parameter vector θ."""
