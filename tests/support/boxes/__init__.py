"""Boxes of one network on one Linux machine, made of namespaces: `network.Network` starts them."""
