"""From stored runs to the seconds of each thing on their machine."""
