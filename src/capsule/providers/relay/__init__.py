"""The way to an agent whose socket the host cannot reach: `capsule-agent relay` carries every
connection over one stream (spec/relay.md). Who has a stream to such a process has connections."""
