"""The tools that people try first, as `kvasir-tiny` practises them.

Why this exists: the first tool that anybody shows a model is the weather or a sum, and the tests of
the libraries that call models have tools of their own. These are practised by name, with their usual
questions; the tests of other tools show what the model does with one that it never saw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """`names` and `keys`: one of each is drawn. `asks`: questions, with a place for each argument."""

    names: str
    words: tuple[str, str]
    keys: tuple[tuple[str, str], ...]  # (names of the key, kind of its value)
    asks: str


KNOWN = (
    Known(
        "get_weather get_weather get_current_weather weather getWeather",
        ("get", "weather"),
        (("city location city location place location", "place"),),
        "What is the weather in {}?|What's the weather in {}?|What is the weather like in {}?|Weather in {}?"
        "|What's the weather like in {} today?|How is the weather in {}?|Get the weather in {}."
        "|Is it raining in {}?|Tell me the weather in {}.|weather in {}|What is the weather in {} now?",
    ),
    Known(
        "get_weather get_current_weather",
        ("get", "weather"),
        (("city location", "place"), ("unit", "degrees")),
        "What is the weather in {} in {}?|What's the weather in {} in {}?|Weather in {}, in {}"
        "|Get the weather in {} in {}.",
    ),
    Known(
        "get_temperature get_current_temperature",
        ("get", "temperature"),
        (("city location", "place"),),
        "What is the temperature in {}?|How warm is it in {}?|How cold is it in {}?|Temperature in {}?",
    ),
    Known(
        "add add add_numbers sum",
        ("add", "sum"),
        (("a x first", "integer"), ("b y second", "integer")),
        "What is {} + {}?|What is {} plus {}?|Add {} and {}.|add {} and {}|Add {} to {}|{} + {}"
        "|What's {} + {}?|Use the tool to add {} and {}.|Please add {} and {}.|What is the sum of {} and {}?",
    ),
    Known(
        "multiply multiply_numbers",
        ("multiply", "product"),
        (("a x first", "integer"), ("b y second", "integer")),
        "What is {} * {}?|What is {} times {}?|Multiply {} by {}.|Multiply {} and {}.|{} * {}"
        "|What's {} x {}?",
    ),
    Known(
        "magic_function magic_function magic get_magic",
        ("apply", "magic function"),
        (("input x input", "integer"),),
        "What is the value of magic_function({})? Use the tool.|What is magic_function({})?"
        "|Call magic_function with {}.|What is the value of magic_function of {}?|magic_function({})",
    ),
    Known(
        "magic_function_no_args get_magic_value",
        ("get", "magic value"),
        (),
        "What is the value of magic_function_no_args()? Use the tool.|Call magic_function_no_args."
        "|magic_function_no_args()|Get the magic value.|Use the magic function.",
    ),
    Known(
        "search web_search search_web",
        ("search", "web"),
        (("query q query", "string"),),
        "Search for {}.|Search the web for {}.|Look up {}.|Find {}|search {}|Search {}|Please search for {}.",
    ),
    Known(
        "get_time get_current_time",
        ("get", "time"),
        (("city location timezone", "place"),),
        "What time is it in {}?|What is the time in {}?|Get the time in {}.|Time in {}?"
        "|What's the time in {}?",
    ),
    Known(
        "calculate calculator",
        ("calculate", "result"),
        (("expression", "sum"),),
        "What is {}?|Calculate {}.|Calculate {}|Compute {}.|What's {}?",
    ),
    Known(
        "get_user find_user lookup_user",
        ("find", "user"),
        (("name", "person"),),
        "Find the user {}.|Who is {}?|Look up {}.|Get user {}|Find {}.",
    ),
    Known(
        "send_message send_email",
        ("send", "message"),
        (("to recipient", "person"), ("text body message", "string")),
        "Send {} the message {}.|Write to {}: {}|Tell {} {}|Send a message to {}: {}|Send {} an email: {}",
    ),
    Known(
        "get_capital capital",
        ("get", "capital"),
        (("country", "country"),),
        "What is the capital of {}?|Capital of {}?|Get the capital of {}.",
    ),
    Known(
        "get_price get_stock_price",
        ("get", "price"),
        (("symbol ticker item product", "string"),),
        "What is the price of {}?|Price of {}?|What does {} cost?|Get the price of {}.",
    ),
)
RECORDS = (  # keys with the kinds of their values, and what is said of them
    (
        ("name", "person", "age", "integer"),
        "{} is {} years old.|My name is {} and I am {} years old.|{}, {} years old|{} is {}."
        "|Extract the person: {} is {} years old.|I am {}, age {}.",
    ),
    (
        ("name", "person", "age", "integer", "city", "place"),
        "{} is {} years old and lives in {}.|My name is {}, I am {} and I live in {}.|{}, {}, from {}",
    ),
    (("name", "person", "city", "place"), "{} lives in {}.|{} is from {}.|My name is {} and I live in {}."),
    (("city", "place", "country", "country"), "{} is in {}.|{} is a city in {}.|{}, {}"),
    (("city", "place", "temperature", "integer"), "In {} it is {} degrees.|{}: {} degrees"),
    (
        ("name", "place", "inhabitants", "integer"),
        "Describe the city named {} with {} inhabitants.|The city {} has {} inhabitants.|{}, {} inhabitants"
        "|{} is a city with {} inhabitants.",
    ),
    (("name", "person"), "My name is {}.|I am {}.|Hello, I am {}.|This is {}."),
)
NAMES = frozenset(name for known in KNOWN for name in known.names.split())


@dataclass(frozen=True)
class Drawn:
    """A known tool with its name and keys chosen."""

    name: str
    words: tuple[str, str]
    keys: list[str]
    kinds: list[str]
    asks: tuple[str, ...]


def draw(rng: random.Random) -> Drawn:
    known = rng.choice(KNOWN[:1] * 2 + KNOWN)
    drawn = rng.randrange(6)
    keys = [(each := names.split())[drawn % len(each)] for names, _ in known.keys]
    kinds = [kind for _, kind in known.keys]
    return Drawn(rng.choice(known.names.split()), known.words, keys, kinds, tuple(known.asks.split("|")))


def record(rng: random.Random) -> Drawn:
    """The fields of a record, and what a user says of one."""
    parts, asks = rng.choice(RECORDS)
    return Drawn("", ("", ""), list(parts[::2]), list(parts[1::2]), tuple(asks.split("|")))
