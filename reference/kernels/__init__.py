"""Our own solutions, each a complete hand-in: torch, triton and the standard library, nothing of ours."""
