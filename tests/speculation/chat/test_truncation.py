"""Which turns are left out of a conversation that outgrows its context."""

from __future__ import annotations

from collections.abc import Sequence

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


def left_out(messages: list[Message], before: int = 0, room: int = 20) -> int:
    return turns_to_leave_out(messages, Counter(), 100, room, before)


def test_a_conversation_that_fits_with_room_for_the_reply_is_kept_whole() -> None:
    assert left_out(conversation(30, 30, 20)) == 0
    assert left_out(conversation(10)) == 0


def test_a_conversation_that_does_not_fit_is_cut_to_half_the_context() -> None:
    assert left_out(conversation(30, 30, 21)) == 2
    assert left_out(conversation(30, 30, 20, 1)) == 2
    assert left_out(conversation(*[10] * 8, 1)) == 4
    assert left_out(conversation(*[10] * 8, 1, system=9)) == 4
    assert left_out(conversation(*[10] * 8, 1, system=10)) == 5


def test_turns_left_out_stay_out_while_the_conversation_grows() -> None:
    assert left_out(conversation(*[10] * 9, 1), before=4) == 4
    assert left_out(conversation(*[10] * 11, 10), before=4) == 4
    assert left_out(conversation(*[10] * 12, 1), before=4) == 8


def test_turns_return_when_there_is_enough_room_again() -> None:
    assert left_out(conversation(*[10] * 7, 1), before=4) == 0
    assert left_out(conversation(*[10] * 9, 1), before=8) == 5
    assert left_out(conversation(1), before=4) == 0
    assert left_out(conversation(*[10] * 9, 1), before=4, room=5) == 4


def test_a_long_last_turn_keeps_as_much_before_it_as_fits_and_is_kept_itself() -> None:
    assert left_out(conversation(30, 10, 10, 60)) == 1
    assert left_out(conversation(30, 10, 10, 80)) == 3
    assert left_out(conversation(30, 30, 90)) == 2
    assert left_out(conversation(30, 30, 900), before=1) == 2
    assert left_out(conversation(900)) == 0


def test_a_started_reply_belongs_to_the_last_turn() -> None:
    assert left_out(conversation(20, 20, 10, started=35)) == 2
    assert left_out(conversation(20, 20, 10, started=70)) == 2


def test_hundreds_of_turns_need_only_a_few_short_counts() -> None:
    count = Counter()
    messages = conversation(*[10] * 500, 1)
    assert turns_to_leave_out(messages, count, 100, 20) == 496
    assert count.counts[0] == 5001
    assert len(count.counts) < 15
    assert max(count.counts[1:]) < 200
    count = Counter()
    assert turns_to_leave_out(conversation(*[10] * 502, 1), count, 100, 20, 496) == 496
    assert count.counts == [61]
    count = Counter()
    assert turns_to_leave_out(conversation(*[10] * 500, 1), count, 100, 20, 496) == 496
    assert count.counts == [41, 1, 51, 91]


def test_turns_are_left_out_whole_and_the_system_prompt_stays() -> None:
    messages = conversation(2, 3, 4, system=1)
    assert without_turns(messages, 0) == messages
    assert without_turns(messages, 1) == [messages[0], *messages[3:]]
    assert without_turns(messages, 2) == [messages[0], messages[5]]
    # A greeting by the assistant is left out first.
    messages = [{"role": "assistant", "content": "Hello!"}, *conversation(2, 1)]
    assert without_turns(messages, 1) == messages[1:]
    assert without_turns(messages, 2) == messages[3:]


def test_a_reply_gets_room_for_max_tokens_or_a_quarter_of_the_context() -> None:
    rooms = [room_for_reply(*limits) for limits in ((8192, 1024), (2048, 1024), (2048, None))]
    assert rooms == [1024, 512, 512]
