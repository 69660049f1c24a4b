"""What listens in a sandbox, reached from outside: `http://PORT-ID.domain/…`.

    room      who may come in, and what those are told who may not, or find nobody there
    headers   what goes in and out of a request's headers on the way
    http      one request and its answer
    socket    one WebSocket
    pages     what a browser is shown when there is nothing to see

Requests are parsed and written anew, never passed on as bytes: what a program in a sandbox and we
understand by a request is the same.
"""
