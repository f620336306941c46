"""The engine and the HTTP server as two processes, so that neither waits for the other's interpreter.

- `messages`: what they send each other, and frames on a socket
- `engine_service`: the engine's side; one message for a whole step
- `remote_engine`: the server's side; tokens become text when a client's turn comes

`piledriver.serve.front_end` starts the server's process.
"""
