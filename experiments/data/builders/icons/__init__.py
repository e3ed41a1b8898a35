"""The icons that ship with the project, and the builder that reads them."""
