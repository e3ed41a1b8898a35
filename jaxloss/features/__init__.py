"""What is measured of features, and what is done to them: subspaces, prototypes, queues."""
