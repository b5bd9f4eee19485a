"""Privacy costs of trainings and requests, and a client's ledger of them."""
