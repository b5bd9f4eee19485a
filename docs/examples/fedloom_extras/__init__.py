"""A method, a data source and a model of one's own, in a package beside FedLoom (docs/extending.md)."""
