"""Which turns are left out of a conversation that outgrows its context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculation.chat.template import Message
from speculation.chat.truncation import room_for_reply, turns_to_leave_out, without_turns


def conversation(*lengths: int, system: int = 0, started: int = 0) -> list[Message]:
    """Turns of the given numbers of tokens, one of which is the user's. The last turn has only the
    user's message, and ``started`` tokens of a reply if there is one."""
    messages: list[Message] = [{"role": "system", "content": "s" * system}] if system else []
    for length in lengths[:-1]:
        messages.append({"role": "user", "content": "u"})
        messages.append({"role": "assistant", "content": "a" * (length - 1)})
    messages.append({"role": "user", "content": "u" * lengths[-1]})
    if started:
        messages.append({"role": "assistant", "content": "a" * started})
    return messages


class Counter:
    """Counts one token per character, and records the counts."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, messages: Sequence[Message]) -> int:
        self.counts.append(sum(len(message["content"]) for message in messages))
        return self.counts[-1]


TENS = [10] * 12
CASES: list[tuple[list[int], dict[str, int], int]] = [
    # It fits with room for the reply, or is cut to half the context.
    ([30, 30, 20], {}, 0), ([10], {}, 0), ([30, 30, 21], {}, 2), ([30, 30, 20, 1], {}, 2),
    ([*TENS[:8], 1], {}, 4),
    ([*TENS[:8], 1], {"system": 9}, 4), ([*TENS[:8], 1], {"system": 10}, 5),
    # Turns stay out while it grows, and return when there is enough room again.
    ([*TENS[:9], 1], {"before": 4}, 4), ([*TENS[:11], 10], {"before": 4}, 4),
    ([*TENS, 1], {"before": 4}, 8), ([*TENS[:7], 1], {"before": 4}, 0),
    ([*TENS[:9], 1], {"before": 8}, 5), ([1], {"before": 4}, 0),
    ([*TENS[:9], 1], {"before": 4, "room": 5}, 4),
    # A long last turn is kept, with as much before it as fits; a started reply belongs to it.
    ([30, 10, 10, 60], {}, 1), ([30, 10, 10, 80], {}, 3), ([30, 30, 90], {}, 2),
    ([30, 30, 900], {"before": 1}, 2), ([900], {}, 0),
    ([20, 20, 10], {"started": 35}, 2), ([20, 20, 10], {"started": 70}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "more", "n_left_out"), CASES)
def test_turns_are_left_out(lengths: list[int], more: dict[str, int], n_left_out: int) -> None:
    room, before = more.get("room", 20), more.get("before", 0)
    parts = {name: n for name, n in more.items() if name in ("system", "started")}
    messages = conversation(*lengths, **parts)
    assert turns_to_leave_out(messages, Counter(), 100, room, before) == n_left_out


def test_hundreds_of_turns_need_only_a_few_short_counts() -> None:
    count = Counter()
    messages = conversation(*[10] * 500, 1)
    assert turns_to_leave_out(messages, count, 100, 20) == 496
    assert count.counts[0] == 5001
    assert len(count.counts) < 15
    assert max(count.counts[1:]) < 200
    for size, counts in ((502, [61]), (500, [41, 1, 51, 91])):
        count = Counter()
        assert turns_to_leave_out(conversation(*[10] * size, 1), count, 100, 20, 496) == 496
        assert count.counts == counts


def test_turns_are_left_out_whole_and_the_system_prompt_stays() -> None:
    messages = conversation(2, 3, 4, system=1)
    assert without_turns(messages, 0) == messages
    assert without_turns(messages, 1) == [messages[0], *messages[3:]]
    assert without_turns(messages, 2) == [messages[0], messages[5]]
    # A greeting by the assistant is left out first.
    messages = [{"role": "assistant", "content": "Hello!"}, *conversation(2, 1)]
    assert without_turns(messages, 1) == messages[1:]
    assert without_turns(messages, 2) == messages[3:]
    rooms = [room_for_reply(*limits) for limits in ((8192, 1024), (2048, 1024), (2048, None))]
    assert rooms == [1024, 512, 512]
