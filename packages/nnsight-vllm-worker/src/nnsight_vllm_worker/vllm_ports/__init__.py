"""Every touch of a vLLM private, one module per concern.

Each module begins with what it relies on and checks that when the engine starts, so that another
vLLM is refused there with the name of what it lacks, and not found out in the middle of a request.
"""
