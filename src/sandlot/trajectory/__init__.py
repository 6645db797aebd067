"""Turns, the token tree, samples, audit, journal, run directory. No tokenizer, no torch, no HTTP."""
