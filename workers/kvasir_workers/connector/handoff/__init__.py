"""The hand-off halves of the connector: offers and pulls of KV between workers."""
