"""Who must act: three kinds of failure that are never confused with a verdict."""


class UserError(Exception):
    """The request cannot be done; the message tells the person what to do. Shown as it is."""


class AssignmentError(Exception):
    """An assignment folder is wrong; the message names file, key, value and remedy. For instructors."""


class GraderFault(Exception):  # noqa: N818 (a fault is not the caller's error)
    """Something of ours failed. The submission stays ungraded and nothing counts against the student."""
