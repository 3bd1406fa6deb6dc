"""Every error gyre-transport raises derives from `TransportError`."""


class TransportError(Exception):
    """Base of the package's errors; the message names what was expected, what came and the remedy."""


class ConfigError(TransportError):
    """A configuration file or override is wrong."""


class BusError(TransportError):
    """A message could not be exchanged."""


class DataError(TransportError):
    """Registered memory could not be read."""


class DeadlineExceeded(BusError, DataError):
    """No answer, or not all bytes, came before the deadline; a request may or may not have been carried out."""


class RemoteError(BusError):
    """The peer's handler refused or failed.

    `kind` is the peer's exception class name, so that a caller can tell refusals apart without sharing classes.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class ProtocolError(BusError):
    """Bytes that do not decode as the protocol expected here."""


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol, or another version of it."""


class AccessDenied(DeadlineExceeded):
    """The peer refuses this process's keys, or its lack of any, and did so until the deadline."""


class PublisherSilent(BusError):
    """A publisher sent neither message nor heartbeat for longer than the subscriber allows."""


class ProcessError(TransportError):
    """A child process could not be started, did not become ready, or ended before it should."""


class Unreachable(DataError):
    """Registered memory cannot be read from here: no way leads to its machine, or the kernel refuses."""


class StaleDescriptor(DataError):
    """The memory behind a descriptor was deregistered, or its process ended or restarted."""


class StaleVersion(DataError):
    """A snapshot's version has moved on; ask for the current manifest."""


class Cancelled(DataError):
    """A read was cancelled; its destination holds no meaning."""


class OtherContent(DataError):
    """A descriptor is of another model, version or rank layout than the reader expects."""


class ShapeMismatch(DataError):
    """The destination's size, dtype or shape differs from what was registered, or it is not contiguous."""


class ChecksumMismatch(DataError):
    """Bytes arrived that are not the bytes that were published."""


class TicketError(DataError):
    """A ticket of a served folder cannot be written or used."""
