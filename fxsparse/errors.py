"""The exceptions and warnings of fxsparse. Wrong arguments raise plain ``ValueError``/``TypeError``."""


class CaptureError(RuntimeError):
    """The model cannot be captured in the way that was asked for; says why and what to do."""


class VerificationError(RuntimeError):
    """The compiled module and the dense model differ on ``example_inputs``."""


class NothingRewrittenWarning(UserWarning):
    """No weight was rewritten: the model came back as it was."""
