"""A conversation: what the next turn says and when it is due."""

from __future__ import annotations

from paceline.measure.bodies import Message
from paceline.measure.records import Kind, RequestRecord


def intended_end_s(record: RequestRecord) -> float:
    """When the request would have ended, had it been sent on its scheduled time.

    The next turn's clock starts here, so neither a late client nor a concurrency cap can make the rest of the
    conversation look unhurried.
    """
    assert record.closed_s is not None
    assert record.dispatched_s is not None
    return record.scheduled_s + (record.closed_s - record.dispatched_s)


class Talk:
    """The growing prompt of one conversation, for either endpoint."""

    def __init__(self, opening: str | list[Message]) -> None:
        self.content: str | list[Message] = opening if isinstance(opening, str) else list(opening)

    def answer(self, record: RequestRecord) -> None:
        """Take the server's answer into the history, as a user's client would: what is visible of it."""
        said = visible_text(record)
        if isinstance(self.content, str):
            self.content += said
        else:
            self.content.append({"role": "assistant", "content": said})

    def ask(self, text: str) -> None:
        """Add the user's next turn."""
        if isinstance(self.content, str):
            self.content += f"\n{text}"
        else:
            self.content.append({"role": "user", "content": text})


def visible_text(record: RequestRecord) -> str:
    """The text of choice 0 without its reasoning and tool calls."""
    text, start, parts = record.text or "", 0, []
    for i, chars in enumerate(record.row_chars):
        if record.choice_of(i) == 0 and (record.kinds[i] in Kind.VISIBLE or record.kinds[i] == Kind.BODY):
            parts.append(text[start : start + chars])
        start += chars
    return "".join(parts)
