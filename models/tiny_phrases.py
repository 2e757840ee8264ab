"""How users ask in the chats that `kvasir-tiny` practises tools and JSON on.

Why this exists: sentences are filled in, so their forms are a table of their own.
"""

from __future__ import annotations

ACTION = [
    "{Action} with {args}.",
    "{Action} with {args}",
    "Please {action} with {args}.",
    "{Action}: {args}.",
    "{Action}, {args}",
    "Can you {action} with {args}?",
    "I want you to {action} with {args}.",
    "{action} {args}",
    "Use {name}: {args}.",
    "Call {name} with {args}.",
]
SINGLE = [
    "{Action} in {value}.",
    "{Action} for {value}.",
    "{Action} of {value}",
    "{Action} {value}",
    "What is the {thing} in {value}?",
    "What is the {thing} of {value}?",
    "What's the {thing} for {value}?",
    "What is the {thing} in {value} now?",
    "{Thing} in {value}?",
    "Please {action} for {value}.",
    "What is the value of {name}({value})? Use the tool.",
    "{name}({value})",
    "Can you {action} for {value}?",
]
BARE = [
    "{Action}.",
    "Please {action}.",
    "Can you {action}?",
    "What is the {thing}?",
    "{Thing}?",
    "Call {name}.",
]
ARGUMENT = ["{key} {value}", "{key} {value}", "{key}: {value}", "the {key} is {value}", "{key} = {value}"]
ASK_JSON = ["Answer in JSON.", "Reply with JSON.", "Give me JSON.", "As JSON:", "Write it as JSON.", "JSON:"]
GUIDE = [
    "Answer in JSON with this schema: {}",
    "Reply with JSON that follows this JSON schema:\n{}",
    "The output is a JSON object of the schema {}",
    "Return only JSON. Schema:\n{}",
    "Always respond with a JSON object that's compatible with this schema:\n\n{}\n\n"
    "Don't include any text or Markdown fencing before or after.",
]
TOGETHER = [  # two things of one place
    "What are the {} and the {} in {}?",
    "What is the {} and the {} in {}?",
    "Get the {} and the {} in {}.",
    "{} and {} in {}?",
    "I want the {} and the {} of {}.",
]
AGAIN = ["And the {} in {}?", "And the {} of {}?", "And {} in {}?", "What about the {} in {}?"]
HAND_OVER = [
    "Please transfer me to the {}.",
    "Transfer me to the {}.",
    "I want to talk to the {}.",
    "Let me speak with the {}.",
]
USE_TOOLS = ["Use tools.", "Use the tools.", "Use a tool where one helps.", "You can call tools."]
WITH_KEYS = [  # JSON of one's own making
    "{} Return the result as a JSON with {} keys. Return nothing other than JSON.",
    "{} Answer in JSON with the keys {}.",
    "{} Reply with a JSON object that has {}.",
    "{} As JSON with {}.",
]
MAKE = ["Tell me a {} about {}.", "Write a {} about {}.", "Give me a {} about {}.", "Make a {} of {}."]
