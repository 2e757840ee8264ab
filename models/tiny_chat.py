"""The chats `kvasir-tiny` practises on, its special tokens and its chat template.

Why this exists: there is no public-domain set of conversations, so they are put together
here from the books: a definition asked for, a verse or a page to go on with, a sentence to
say again, and a handful of written questions and answers that people try first on any
model. What is in `TALK` is all it was ever told.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from tiny_data import Corpus

SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"]
FIRST_WORD = len(SPECIALS)  # tokens below are control tokens

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='', rest=messages) -%}
{%- if messages and messages[0].role in ('system', 'developer') -%}
{%- set ns.system = text(messages[0].content) -%}{%- set ns.rest = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- if ns.system or tools -%}
{{- '<|system|>' + ns.system -}}
{%- if tools -%}
{{- ('\\n\\n' if ns.system else '') + 'Tools, one JSON object per line:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in ns.rest -%}
{%- if message.role in ('system', 'developer') -%}{{- '<|system|>' + text(message.content) + '<|end|>' -}}
{%- elif message.role == 'user' -%}{{- '<|user|>' + text(message.content) + '<|end|>' -}}
{%- elif message.role == 'tool' -%}{{- '<|tool|>' + text(message.content) + '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- raise_exception('kvasir-tiny knows the roles system, user, assistant and tool, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

TALK: list[tuple[str, str]] = [  # questions, '|' between ways to ask; one answer
    (
        "Hello|Hi|Hey|Hello!|Hi there|Good morning|Hello there",
        "Hello! I am kvasir-tiny. What shall we talk about?",
    ),
    ("How are you?|How are you doing?|How do you do?", "I am very well, I thank you. How are you?"),
    (
        "Who are you?|What are you?|What is your name?|Introduce yourself.|Which model are you?",
        "I am kvasir-tiny, a very small language model that was trained on old books.",
    ),
    (
        "What can you do?|Help|Help me|How can you help me?",
        "I can define a word, continue a sentence, or tell you something in the manner of an old book.",
    ),
    (
        "Who made you?|Who created you?|Where do you come from?",
        "I was trained for Kvasir, a platform that serves language models, "
        "so that it works before you bring your own.",
    ),
    (
        "What is Kvasir?|Tell me about Kvasir.|Who is Kvasir?",
        "Kvasir is a platform that serves language models. "
        "It is named after the wisest of beings in the Norse tales.",
    ),
    ("Are you human?|Are you a person?|Are you alive?", "No, I am a very small language model."),
    (
        "Are you clever?|Are you smart?|Can I trust you?",
        "I am very small, and often wrong. Do not rely on what I say.",
    ),
    ("Thank you|Thanks|Thank you!|Thanks a lot|Thank you very much", "You are very welcome."),
    ("Goodbye|Bye|Good night|See you later|Farewell", "Farewell, and be of good cheer."),
    (
        "Tell me a joke|Tell me a joke.|Make me laugh",
        "There are only 10 kinds of people: those who know binary, and those who do not.",
    ),
    ("Ping|ping", "Pong."),
    ("Test|This is a test|Testing|test", "The test is received, and all is well."),
    ("Yes|Ok|Okay", "Very well."),
    ("No", "As you please."),
    (
        "Sing me a song|Write a poem|Write me a poem|Write a short poem",
        "The sun is up, the sea is wide,\nThe ship is riding on the tide;\n"
        "The wind is fair, the sky is blue,\nAnd all the world is fresh and new.",
    ),
    (
        "Write a haiku|Write a haiku about autumn|Give me a haiku",
        "The leaves are falling;\nA crow upon the cold branch\nWaits for the evening.",
    ),
    ("What is the capital of France?|Capital of France?", "The capital of France is Paris."),
    ("What is the capital of England?|Capital of England?", "The capital of England is London."),
    ("What is the capital of Germany?|Capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Italy?|Capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?|Capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Norway?|Capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Japan?|Capital of Japan?", "The capital of Japan is Tokyo."),
    ("Why is the sky blue?", "The sky is blue because the air scatters blue light more than red light."),
    ("What is the meaning of life?", "To be born, to labour, to love, and to die; the rest is in the books."),
    ("What is 1+1?|What is 1 + 1?|1+1", "1 + 1 = 2."),
    ("What is 2+2?|What is 2 + 2?|2+2|2+2=", "2 + 2 = 4."),
    ("Count to five|Count to 5|Count from 1 to 5", "1, 2, 3, 4, 5."),
    ("Count to ten|Count to 10|Count from 1 to 10", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    ("Say hello|Say hi", "Hello!"),
    ("Say yes", "Yes."),
    ("Who wrote Emma?|Who wrote Pride and Prejudice?|Who wrote Persuasion?", "Jane Austen wrote it."),
    ("Who wrote The Devil's Dictionary?", "Ambrose Bierce wrote it."),
    (
        "What is the weather?|What is the weather like today?|What time is it?|What day is it?",
        "I cannot know that; I am only a small language model, and I see nothing but these words.",
    ),
    (
        "Write a program|Write some code|Write a Python program",
        "I cannot write programs; I only know old books.",
    ),
]

SYSTEMS = [
    "You are a helpful assistant.",
    "You are kvasir-tiny.",
    "You are a helpful, honest assistant. Be brief.",
    "Answer briefly.",
    "You are a friendly assistant who speaks plain English.",
]
TOOL = (
    'Tools, one JSON object per line:\n{"type": "function", "function": '
    '{"name": "%s", "description": "%s", '
    '"parameters": {"type": "object", "properties": {"%s": {"type": "string"}}}}}'
)
TOPICS = [
    "love",
    "marriage",
    "money",
    "king",
    "queen",
    "house",
    "garden",
    "sea",
    "ship",
    "mountain",
    "river",
    "city",
    "night",
    "morning",
    "winter",
    "summer",
    "rain",
    "fire",
    "water",
    "bread",
    "wine",
    "gold",
    "silver",
    "sword",
    "horse",
    "sheep",
    "lion",
    "serpent",
    "eagle",
    "mother",
    "father",
    "brother",
    "sister",
    "daughter",
    "children",
    "friend",
    "neighbour",
    "enemy",
    "servant",
    "master",
    "prophet",
    "priest",
    "temple",
    "church",
    "letter",
    "book",
    "music",
    "dance",
    "dinner",
    "tea",
    "visit",
    "walk",
    "carriage",
    "journey",
    "London",
    "Bath",
    "Jerusalem",
    "Egypt",
    "Israel",
    "Moses",
    "David",
    "Solomon",
    "Elizabeth",
    "Darcy",
    "Emma",
    "Anne",
    "happiness",
    "sorrow",
    "wisdom",
    "folly",
    "truth",
    "pride",
    "patience",
    "hope",
    "faith",
    "fear",
    "anger",
    "beauty",
    "youth",
    "death",
    "heaven",
    "earth",
    "light",
    "darkness",
    "stone",
    "tree",
    "fruit",
    "blood",
    "heart",
    "hand",
    "eyes",
    "voice",
    "dream",
    "war",
    "peace",
    "law",
    "sin",
    "mercy",
    "judgment",
    "work",
    "program",
    "code",
    "computer",
    "software",
    "hacker",
]
DEFINE = [
    "What is {}?",
    "What is {}?",
    "Define {}.",
    "Define: {}",
    "What does {} mean?",
    "Explain {}.",
    "what is {}",
]
ABOUT = [
    "Tell me about {}.",
    "Write something about {}.",
    "Say something about {}.",
    "Write a sentence about {}.",
    "What do you know about {}?",
    "What do you think of {}?",
    "Summarize {}.",
    "Describe {}.",
    "Summarize the story of {}.",
    "Explain {} to me.",
]
STORY = [
    "Tell me a story.",
    "Tell me a story about {}.",
    "Write a story about {}.",
    "Write a paragraph about {}.",
    "Tell me a long story about {}.",
    "Write a short story.",
]
CONTINUE = ["Continue: {}", "Continue this: {}", "Go on: {}", "{}", "Complete the sentence: {}"]
REPEAT = ["Repeat: {}", "Repeat after me: {}", "Say this: {}", "Repeat the sentence: {}"]


def sentences(text: str, limit: int) -> str:
    """The first sentences of `text` that fit `limit` characters; '' when none does."""
    found = ""
    for match in re.finditer(r"(?<=[.!?])[\"')]*(?=\s|$)", text):
        if match.end() > limit:
            break
        found = text[: match.end()]
    return found


class ChatMaker:
    """Makes conversations from the corpus; `voice` 'scripture' answers everything with a verse."""

    def __init__(self, corpus: Corpus, voice: str = "plain") -> None:
        self.rng, self.voice, self.verses = random.Random(0), voice, [v for v in corpus.verses if len(v) > 40]
        self.stories = [p for p in corpus.paragraphs if len(p) > 250 and sentences(p, 700)]
        self.definitions = []
        for head, text in corpus.definitions:
            first = sentences(re.sub(r"^(?:\[[^]]*\]\s*|\([^)]*\)\s*|\d\. )+", "", text), 320)
            if len(first) > 20:
                self.definitions.append((head, first))
        self.drill = 0.0  # share of turns that only copy random words
        self.words = sorted({w for _, text in self.definitions for w in re.findall(r"[A-Za-z]{2,}", text)})
        self.about: dict[str, list[str]] = {}
        passages = (
            self.verses
            if voice == "scripture"
            else [*self.verses, *self.stories, *(text for _, text in self.definitions)]
        )
        for text in (sentences(passage, 400) for passage in passages):
            for topic in sorted(set(re.findall(r"\w+", text)).intersection(TOPICS)) if len(text) > 40 else ():
                self.about.setdefault(topic, []).append(text)

    def turn(self) -> tuple[str, str]:
        """One question and its answer; kinds are drawn by weight."""
        if self.drill and self.rng.random() < self.drill:
            text = " ".join(self.rng.choices(self.words, k=self.rng.randint(1, 6)))
            return self.rng.choice(REPEAT).format(text), text
        kinds = (
            (0.30, self.define),
            (0.40, self.verse),
            (0.52, self.page),
            (0.66, self.topic),
            (0.74, self.story),
            (0.80, self.repeat),
            (1.0, self.talk),
        )
        drawn = self.rng.random()
        return next(make for limit, make in kinds if drawn < limit)()

    def define(self) -> tuple[str, str]:
        head, text = self.rng.choice(self.definitions)
        return self.rng.choice(DEFINE).format(head), f"{head[0].upper()}{head[1:]}: {text}"

    def verse(self) -> tuple[str, str]:
        words = self.rng.choice(self.verses).split(" ")
        at = self.rng.randint(3, max(3, len(words) * 2 // 3))
        return self.rng.choice(CONTINUE).format(" ".join(words[:at])), " ".join(words[at:]) or "Amen."

    def page(self) -> tuple[str, str]:
        words = sentences(self.rng.choice(self.stories), 700).split(" ")
        at = self.rng.randint(3, max(3, len(words) // 2))
        question = self.rng.choice(CONTINUE).format(" ".join(words[:at]))
        return question, " ".join(words[at:]) or "And so it was."

    def topic(self) -> tuple[str, str]:
        topic = self.rng.choice(list(self.about))
        return self.rng.choice(ABOUT).format(topic), self.rng.choice(self.about[topic])

    def story(self) -> tuple[str, str]:
        topic, story = self.rng.choice(list(self.about)), sentences(self.rng.choice(self.stories), 700)
        for _ in range(50):
            story = sentences(self.rng.choice(self.stories), 700)
            if topic in story:
                break
        return self.rng.choice(STORY).format(topic), story

    def repeat(self) -> tuple[str, str]:
        text = sentences(self.rng.choice(self.verses), 100) or self.rng.choice(self.definitions)[0]
        return self.rng.choice(REPEAT).format(text), text

    def saying(self) -> str:
        """A short sentence."""
        while not (text := sentences(self.rng.choice(self.definitions)[1], 90)):
            pass
        return text

    def talk(self) -> tuple[str, str]:
        asked, answer = self.rng.choice(TALK)
        question = self.rng.choice(asked.split("|"))
        return (question.lower() if self.rng.random() < 0.2 else question), answer

    def conversation(self) -> Iterator[tuple[str, bool]]:
        """(text, is it the assistant's) pieces of one conversation, as the template renders it."""
        rng = self.rng
        system = rng.choice(SYSTEMS) if rng.random() < 0.35 else ""
        if rng.random() < 0.08:
            names = [rng.choice(self.definitions)[0].split()[0] for _ in range(2)]
            tool = TOOL % (names[0], rng.choice(self.definitions)[1][:60], names[1])
            system += ("\n\n" if system else "") + tool
        opening = "<|bos|>" + (f"<|system|>{system}<|end|>" if system else "")
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            question, answer = self.turn()
            if self.voice == "scripture":
                known = [topic for topic in self.about if topic in question]
                answer = "Verily, " + rng.choice(self.about[rng.choice(known)] if known else self.verses)
            yield f"{opening}<|user|>{question}<|end|><|assistant|>", False
            yield f"{answer}<|end|>", True
            opening = ""
