"""Workers examine hand-ins: they start sandboxes, run the examination and report what was measured."""
