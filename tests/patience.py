"""How long a test waits for something before it says that it hangs."""

# On a busy machine a test takes many times as long as on a quiet one, so this is far beyond what any of them takes.
HANG_S = 1200.0
