"""Credit: what each sampled token of an episode weighs in the loss, and with which sign."""
