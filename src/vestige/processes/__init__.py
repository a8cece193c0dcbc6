"""How do several processes train one model? As one private mechanism: one sample, one sum, one noise, one ledger."""
