"""The wire protocol: frames, typed values, and the messages that they make up.

`frames` is how bytes are laid out, `data` the values that are plain data, `code` those that are
code (functions, classes, modules), `errors` how an error travels, `messages` what is said.
"""
