"""Stop strings that never reach the reader, wherever the token borders lie."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches a growing text for stop strings and holds back whatever may still become one.

    Which one ends the text does not depend on how it was cut into pieces: the first to be complete; of several that
    are complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; none means that nothing is ever held back."""
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown now. After a match (`matched`), further text is ignored."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return buffer[:at]
        keep = max(self._open_suffix(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _open_suffix(buffer: str, stop: str) -> int:
        """Length of the longest end of `buffer` that begins `stop`."""
        for length in range(min(len(stop) - 1, len(buffer)), 0, -1):
            if buffer.endswith(stop[:length]):
                return length
        return 0
