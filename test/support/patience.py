"""How long a test waits for what should come soon."""

# Seconds after which a thread or a process is taken to hang: many times what the slowest needs.
HANGS = 900
