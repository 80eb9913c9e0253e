"""Owns a load of growing chat conversations: what is said in which, and in which order. The same for a seed.

A family of conversations (an assistant that many people use) shares a system prompt. A conversation belongs to one
family; each of its turns sends the whole history, with the worker's own answers in it, and one new message. A fixed
number of conversations is active at any time: the next turn is that of one of them, at random, and when one has had its
last turn a new one takes its place, of any family. So there is no drain at the end, and no order that suits a rule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypedDict

# Short common words: a token or two each. What they say doesn't matter, only that no two messages are alike.
_TEXT = (
    "a about after all also and any are as ask at back be but by can case code come could day do each end even find "
    "first for from get give go good great have help here how if in into it its just know last like line list long "
    "look make many may more most name need new next no not now number of on one only open or order other our out over "
    "part people place point read result right run same say see set show so some start state such take text than that "
    "the their them then there these they this time to two type up use value very want way we well what when which who "
    "will with word work would write year you your"
)
_WORDS = _TEXT.split()


class Message(TypedDict):
    """One message of a chat, as OpenAI's API has it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The shape of a load. Lengths are in words, which the tiny model takes about 1.3 tokens for.

    Attributes:
        requests: how many in all.
        families: how many system prompts there are.
        active: conversations at any time.
        in_flight: requests at any time, at most one for each conversation.
        turns: least and most turns of a conversation.
        system_words: length of a system prompt.
        message_words: least and greatest length of a message.
        answer_tokens: what an answer may have.
    """

    requests: int = 300
    families: int = 5
    active: int = 8
    in_flight: int = 4
    turns: tuple[int, int] = (6, 12)
    system_words: int = 300
    message_words: tuple[int, int] = (60, 120)
    answer_tokens: int = 32


@dataclass(slots=True)
class Conversation:
    """One conversation, as far as it has come.

    Attributes:
        name: what a client would send as its `session_id`.
        family: the number of its system prompt.
        history: what was said so far.
        messages: what its user has yet to say, the last one first.
    """

    name: str
    family: int
    history: list[Message]
    messages: list[str]

    def ask(self) -> list[Message]:
        """Return the prompt of its next turn."""
        self.history.append({"role": "user", "content": self.messages.pop()})
        return [*self.history]

    def hear(self, answer: str) -> None:
        """Note what the worker has said."""
        self.history.append({"role": "assistant", "content": answer})


def schedule(load: Load, seed: int = 0) -> list[Conversation]:
    """Return whose turn it is, for each of the load's requests in the order in which they are sent."""
    rng = random.Random(seed)
    systems = [_text(rng, load.system_words) for _ in range(load.families)]
    started = 0

    def start() -> Conversation:
        nonlocal started
        started += 1
        family = rng.randrange(load.families)
        turns = rng.randint(*load.turns)
        messages = [_text(rng, rng.randint(*load.message_words)) for _ in range(turns)]
        return Conversation(
            f"conversation-{started}", family, [{"role": "system", "content": systems[family]}], messages
        )

    active = [start() for _ in range(load.active)]
    left = [len(conversation.messages) for conversation in active]
    order = []
    for _ in range(load.requests):
        place = rng.randrange(load.active)
        order.append(active[place])
        left[place] -= 1
        if not left[place]:
            active[place] = start()
            left[place] = len(active[place].messages)
    return order


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
