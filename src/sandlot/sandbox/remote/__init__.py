"""What backends share whose sandboxes are reached by an API: they give one stream per command, this makes the rest.

A sandbox needs `/bin/sh`, `head`, `grep`, `tar`, `mkdir`, `chmod` and `readlink`, which any distribution's image has.
"""
