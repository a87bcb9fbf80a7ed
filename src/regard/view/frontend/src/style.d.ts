declare module "*.css" {
  const text: string;
  export default text;
}

/** Signs of packed style sheets, each before what it stands for; set by the build. */
declare const STYLE_CODES: string[];
