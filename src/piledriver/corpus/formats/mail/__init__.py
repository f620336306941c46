"""Internet mail: raw messages to their words, and the files that hold many messages."""
