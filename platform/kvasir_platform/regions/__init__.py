"""One router over several cells: the links between cells, and the requests that run in another one.

A cell is a whole deployment in one region. Its router serves the requests of its own gateways, decides by
`kvasir_router.regions` which of them another cell answers sooner, and runs those that other cells send. Which
cell is meant is always relative to a request: its origin is the cell whose gateway has the client, and the
serving cell is the one whose workers compute it.
"""
