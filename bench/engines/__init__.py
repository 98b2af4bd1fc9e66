"""The engines, one module each: `cases()` gives what an engine can be asked to run, by name."""
