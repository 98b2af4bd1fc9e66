"""Every error and warning of ours.

```text
NNsightError
├── CaptureError (SyntaxError)          the body of a `with` block cannot be had
├── EncodeError (TypeError)             a value that cannot be shipped
│   └── SaveLimitError                  more is saved than a request may bring home
├── LocationError (AttributeError)      no such location, or not reachable from here
│   ├── NotATapError                    not declared as a tap where only taps are allowed
│   └── OutOfOrderError                 the forward pass has already gone past it
├── StepError (ValueError)              a loop over steps that no request could make
├── NotSupportedError (NotImplementedError)  what cannot be right here, and what to do instead
├── WriteError (ValueError)             a replacement with other rows, width or dtype
│   └── LateWriteError                  an in-place write to a value whose visit is over
├── BlockError                          an error class that does not exist in this process
├── BlockTimeout (TimeoutError)         a block that ran too long
├── KeptError (LookupError)             a kept value that is not where it is asked for
├── KeepLimitError (MemoryError)        a value for which there is no room to be kept
├── PolicyError (PermissionError)       the receiver does not allow it
├── BusyError (ConnectionError)         a server that takes no more at the moment
├── ProtocolError (ConnectionError)     a peer that speaks otherwise, or stopped speaking
└── EngineError (RuntimeError)          the engine cannot be built
    └── EngineDeadError                 the engine ended while it was needed

NNsightWarning (UserWarning)
├── EditErrorWarning                    an edit raised, and a request went on without it
├── LoopOverrunWarning                  a loop asked for more steps than the request made
└── UnboundSaveWarning                  a saved value that no name holds
```
"""

from __future__ import annotations


class NNsightError(Exception):
    """Base of every error of ours."""


class CaptureError(NNsightError, SyntaxError):
    """The body of a `with` block cannot be captured."""


class EncodeError(NNsightError, TypeError):
    """A value cannot be shipped; the message names it and says what can be done."""


class SaveLimitError(EncodeError):
    """A block saves more than one request may bring home."""


class LocationError(NNsightError, AttributeError):
    """A location does not exist, or cannot be reached from where it was asked for."""


class NotATapError(LocationError):
    """A location is not a tap where only taps are allowed."""


class OutOfOrderError(LocationError):
    """A location was asked for after the forward pass had gone past it."""


class StepError(NNsightError, ValueError):
    """A loop over steps that no request could make: negative, repeated or descending."""


class NotSupportedError(NNsightError, NotImplementedError):
    """Something that cannot be right here; the message says what to do instead."""


class WriteError(NNsightError, ValueError):
    """A replacement does not have the rows, width or dtype of what it replaces."""


class LateWriteError(WriteError):
    """A value was written in place after its visit was over, when nothing reads it any more."""


class BlockError(NNsightError):
    """An error of a block whose class cannot be found in this process."""


class BlockTimeout(NNsightError, TimeoutError):
    """A block ran for too long."""


class KeptError(NNsightError, LookupError):
    """A kept value is not where it is asked for: it is gone, elsewhere, or only on the engine."""


class KeepLimitError(NNsightError, MemoryError):
    """A value for which there is no room to be kept on the engine."""


class PolicyError(NNsightError, PermissionError):
    """The receiver's policy does not allow what was asked for."""


class BusyError(NNsightError, ConnectionError):
    """A server takes no more at the moment: there is too much in it, or it is shutting down.

    Attributes:
        retry_after: after how many seconds it may be asked again, if that can be said.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ProtocolError(NNsightError, ConnectionError):
    """A peer cannot be reached, speaks another protocol, or stopped in the middle.

    Attributes:
        arrived: what had come home before, by name (empty if nothing had).
    """

    def __init__(self, message: str, arrived: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.arrived = arrived or {}


class EngineError(NNsightError, RuntimeError):
    """The engine cannot be built; the message carries the root cause."""


class EngineDeadError(EngineError):
    """The engine ended while it was needed."""


class NNsightWarning(UserWarning):
    """Base of every warning of ours."""


class EditErrorWarning(NNsightWarning):
    """An edit raised in a request, which went on without it; the error is in `output.errors`."""


class LoopOverrunWarning(NNsightWarning):
    """A loop over steps asked for more steps than the request made."""


class UnboundSaveWarning(NNsightWarning):
    """A value was saved but no name of the block holds it, so it cannot come home."""
