"""The gate: integrity, then the deterministic metrics, into one verdict. (Tiers on time come beside these.)"""
