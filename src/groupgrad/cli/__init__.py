"""The `groupgrad` command. Every module here is thin: it reads arguments and calls what lies below."""
