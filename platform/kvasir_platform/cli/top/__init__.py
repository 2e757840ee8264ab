"""`kvasir top`: workers, queues, tenants and requests, live."""
