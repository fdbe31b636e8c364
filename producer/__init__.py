"""The producer: corpus -> chunks -> blocks -> stream."""
