"""The naive chains as complete hand-ins, so that they can be timed in a process like the student's. One op a kernel."""
