"""What experiments read: texts, and pictures, sounds and a graph that are made here."""
