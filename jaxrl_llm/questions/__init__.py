"""Questions: the tasks that supply them, the prompt stream that orders them, the ledger that counts answers."""
