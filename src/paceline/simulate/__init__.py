"""The real scheduler and engine loop on a virtual clock: one engine or a fleet, under traces or made-up traffic."""
