"""The tier halves of the connector: stores and loads of KV below the device."""
