"""The words that tools, keys and values of practice chats are made of.

Why this exists: a model that has seen a tool by its name learns the name, and one that is to call
tools it never saw has to be shown always new ones. So names are put together from the words of the
books. An eighth of the names and shapes is kept for the tests, and for harder tests an eighth of the
words too.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter


def words_of(text: str) -> list[str]:
    return text.split()


VERBS = words_of("""
get find set send book add make open close read write show list search check update create delete
start stop play order buy sell count move copy call take give bring turn fetch save load print draw
plan lock clean mark share look name sort test""")
THINGS = words_of("""
weather time date price stock email message file user account order ticket flight hotel room table
event meeting note task list song photo map route city country place address phone number code page
query text title name topic language level speed color size unit count limit amount total score age
year month day hour minute week start end from to subject body sender owner status type kind mode
format id key tag label group team project customer product item cart payment card bank currency rate
temperature humidity wind light door window lamp alarm timer music movie news recipe food drink
restaurant car bus train station airport user_id first_name last_name zip_code start_date file_name
max_results page_size order_id phone_number email_address""")
CITIES = words_of("""
Paris London Berlin Rome Madrid Oslo Tokyo Lima Cairo Vienna Prague Dublin Athens Lisbon Warsaw Boston
Chicago Seattle Denver Dallas Moscow Delhi Mumbai Sydney Perth Toronto Zurich Geneva Hamburg Munich
Kiev Riga Bergen""")
PEOPLE = words_of("""
Alice Bob Carol Dave Eve Frank Grace Heidi Ivan Judy Peter Paul Mary Anna Tom Jack Ben Lucy Max Ada John
Jane Erick Sam Emma Lena""")
DAYS = words_of("""
Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April""")
PLACES = [*CITIES, "San Francisco", "New York", "San Francisco, CA", "Boston, MA", "New York, NY"]
NAMES = [*PLACES, *PEOPLE, *DAYS]
ENUMS = (
    ["celsius", "fahrenheit"],
    ["low", "medium", "high"],
    ["small", "large"],
    ["open", "closed"],
    ["asc", "desc"],
    ["red", "green", "blue"],
    ["day", "week", "month"],
    ["en", "de", "fr"],
)
STATES = words_of("""
sunny cloudy rainy windy snowy cold warm hot noon midnight dark clear dry wet closed open ready late early
busy empty full sold done""")
COUNTRIES = words_of(
    "France Spain Italy Germany Norway Sweden Japan China India Egypt Brazil Peru Canada Poland Greece"
)
SCRIPTS = ((0x4E00, 0x9FA5), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x430, 0x44F), (0x3B1, 0x3C9), (0xC0, 0xFF))
KNOWN = {"place": PLACES, "person": PEOPLE, "country": COUNTRIES, "sum": []}
TEXTS = frozenset(("string", "enum", "degrees", *KNOWN))
KINDS = ("string", "integer", "number", "boolean", "enum", "array")


def held_out(text: str) -> bool:
    """Whether a word, or the shape of a schema, is kept for the tests."""
    return zlib.crc32(text.encode()) % 8 == 0


class Words:
    """Words of the books by use: `things` in lower case, the `rare` ones apart, `names` with a capital. With
    `kept` only those that are kept for the tests, else all others."""

    def __init__(self, docs: list[str], kept: bool) -> None:
        counts = Counter(re.findall(r"(?<=[a-z,] )[A-Za-z]{3,10}\b", " ".join(docs)))
        lower = [w for w, n in counts.most_common() if n >= 5 and w.islower() and len(w) > 3][150:]
        names = [w for w, n in counts.most_common() if n >= 4 and w.istitle() and counts[w.lower()] < n / 4]
        self.rng, self.kept = random.Random(0), kept
        self.things = [w for w in lower[:1450] if held_out(w) == kept]
        self.rare = [w for w in lower[1450:] if held_out(w) == kept] or self.things
        self.common = self.things if kept else THINGS
        self.names = [w for w in names if held_out(w) == kept]
        self.spelled = [*self.things, *self.rare, *self.common, *self.names, *NAMES]
        if not kept:
            self.names += NAMES * 3

    def thing(self) -> str:
        drawn = self.rng.random()
        return self.rng.choice(self.common if drawn < 0.35 else self.things if drawn < 0.7 else self.rare)

    def key(self) -> str:
        two = self.rng.random() < 0.15
        return f"{self.rng.choice(self.things)}_{self.thing()}" if two else self.thing()

    def text(self) -> str:
        """A string that a user might hand to a tool."""
        drawn = self.rng.random()
        if drawn < 0.05:
            return self.foreign()
        if drawn < 0.45:
            return " ".join(self.rng.choices(self.names, k=self.rng.choice((1, 1, 1, 2))))
        if drawn < 0.9:
            words = self.things if self.rng.random() < 0.5 else self.rare
            return " ".join(self.rng.choices(words, k=self.rng.choice((1, 1, 2, 3))))
        letters = self.rng.choices("ABCDEFGHKLMNPRSTXZ", k=self.rng.randint(1, 2))
        return "".join(letters) + str(self.integer())

    def foreign(self) -> str:
        """A word of letters that the books do not have."""
        first, last = self.rng.choice(SCRIPTS)
        return "".join(chr(self.rng.randint(first, last)) for _ in range(self.rng.randint(2, 8)))

    def integer(self) -> int:
        return self.rng.randrange(self.rng.choice((10, 10, 100, 100, 1000, 10000, 1000000)))

    def value(self, kind: str, choices: list[str]) -> object:
        if kind == "integer":
            return self.integer()
        if kind == "number":
            return self.integer() + self.rng.randint(1, 9) / 10
        if kind == "boolean":
            return self.rng.random() < 0.5
        if choices:
            return self.rng.choice(choices)
        if kind == "array":
            words = self.names if self.rng.random() < 0.5 else self.things
            return self.rng.sample(words, self.rng.randint(2, 3))
        return self.known(kind) if kind in KNOWN else self.text()

    def known(self, kind: str) -> str:
        """A string of a kind that known tools are called with."""
        if kind == "sum":
            return f"{self.integer()} {self.rng.choice('+-*/')} {self.integer()}"
        return self.rng.choice(KNOWN[kind] if self.rng.random() < 0.6 else self.names)


def listed(parts: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def spoken(value: object, rng: random.Random) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool):
        return rng.choice(("yes", "true", "on") if value else ("no", "false", "off"))
    if isinstance(value, list):
        return listed([str(each) for each in value])
    text = str(value)
    quoted = isinstance(value, str) and rng.random() < (0.6 if " " in text else 0.3)
    return rng.choice(('"{}"', '"{}"', "'{}'")).format(text) if quoted else text
