//! The specification of a tensor besides its shape: named values in a fixed order, as stored in manifests.

use crate::{Error, Result};

/// A value of a specification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// True or false.
    Flag(bool),
    /// A number.
    Integer(u64),
    /// A name.
    Text(String),
}

impl From<bool> for Value {
    fn from(flag: bool) -> Value {
        Value::Flag(flag)
    }
}

impl From<u8> for Value {
    fn from(number: u8) -> Value {
        Value::Integer(number.into())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Integer(number)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Value {
        Value::Integer(number as u64)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.into())
    }
}

/// Named values, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details(Vec<(String, Value)>);

impl Details {
    /// Appends a value.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Details {
        self.0.push((name.into(), value.into()));
        self
    }

    /// All names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The value of a name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value)
    }

    /// The number with a name, in any type that can represent it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is missing, not a number, or too large.
    pub fn integer<T: TryFrom<u64>>(&self, name: &str) -> Result<T> {
        match self.get(name) {
            Some(&Value::Integer(number)) => T::try_from(number).or_else(|_| wrong(name, "is too large")),
            Some(_) => wrong(name, "must be a number"),
            None => wrong(name, "is missing"),
        }
    }

    /// The truth value with a name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is missing or not a truth value.
    pub fn flag(&self, name: &str) -> Result<bool> {
        match self.get(name) {
            Some(&Value::Flag(flag)) => Ok(flag),
            Some(_) => wrong(name, "must be true or false"),
            None => wrong(name, "is missing"),
        }
    }
}

fn wrong<T>(name: &str, what: &str) -> Result<T> {
    Err(Error::InvalidArgument(format!(
        "{name} {what} in the specification of a packed tensor"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name_and_type() {
        let details = Details::default()
            .with("bits", 4u8)
            .with("symmetric", true)
            .with("code", "fsv8");
        assert_eq!(details.integer::<u8>("bits"), Ok(4));
        assert_eq!(details.flag("symmetric"), Ok(true));
        assert_eq!(details.get("code"), Some(&Value::Text("fsv8".into())));
        assert!(details.integer::<u8>("group_size").is_err() && details.flag("bits").is_err());
        assert!(details.integer::<u8>("code").is_err());
        assert!(
            Details::default()
                .with("bits", 256usize)
                .integer::<u8>("bits")
                .is_err()
        );
    }
}
