"""Internet mail: raw messages to headers and text."""
