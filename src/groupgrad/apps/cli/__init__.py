"""The `groupgrad` command. Its modules read arguments and call the rooms below."""
