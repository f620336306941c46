"""What the verbs share: the parser, and arguments that several of them take."""
