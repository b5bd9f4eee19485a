"""Generated from protos/fedloom/v1 by ``make protos``; never edited by hand."""
