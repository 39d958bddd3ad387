"""What goes where, and when: arithmetic without torch."""
